"""From calls to samples: the exact-prefix forest, masks and accounting. Pure: no I/O."""
