"""What the user sees on request: the partition as a table, the timetable as a drawing, a line per step."""
