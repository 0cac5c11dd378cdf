"""Process groups, messages, ordered point-to-point channels, and stopping together."""
