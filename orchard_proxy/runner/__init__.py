"""Tasks → n times: sandbox → harness → grade → finished rollout. Knows sandboxes and harnesses only as Protocols."""
