"""Which candidates exist: knobs, rules, candidate to DeepSpeed config."""
