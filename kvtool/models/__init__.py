"""Load models and tokenizers; the bundled reference model lives in `reference`."""
