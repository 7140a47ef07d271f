"""Settings that must be made before anything is imported."""

import os

# OpenBLAS threads spin while they wait: on a busy machine the tiny policy then costs 15 times the CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
