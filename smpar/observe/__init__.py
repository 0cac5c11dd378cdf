"""What ran and when: spans of actions and waits, watched channels, the trace of all ranks, figures of a step."""
