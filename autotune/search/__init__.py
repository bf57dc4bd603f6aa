"""What to try next, and when to stop: Optuna study, samplers, the OOM frontier, confirmations."""
