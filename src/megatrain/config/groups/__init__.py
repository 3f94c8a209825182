"""The keys of a config by subject; `TrainConfig` is all of them and their rules together."""
