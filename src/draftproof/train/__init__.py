"""Draft heads for a target of your own: answers and hidden states by our engine, training by `speculators`."""
