"""Running steps: planning their programs, executing their schedules, moving their tensors."""
