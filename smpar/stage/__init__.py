"""What a microbatch's Python sees in a step: stage tensors, units, and the record of what ran where."""
