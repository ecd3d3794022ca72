"""OpenAI-compatible HTTP over the engine. `options.py` is free of the packages that the `serve` extra installs."""
