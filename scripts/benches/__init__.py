"""The benches that ``scripts/bench`` runs, one file each."""
