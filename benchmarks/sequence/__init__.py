"""Long sequences beside Accelerate's own, and beside the same training on sequences of half the length."""
