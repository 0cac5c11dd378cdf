"""Seeing what runs: spans of actions and waits, reports, timetables."""
