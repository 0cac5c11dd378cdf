"""The planner: costs in, plan out. Imports without torch."""
