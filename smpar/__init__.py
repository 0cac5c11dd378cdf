"""smpar: model-parallel training of any ``nn.Module``."""
