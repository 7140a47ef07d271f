"""Back ends: one kind of sandbox each."""
