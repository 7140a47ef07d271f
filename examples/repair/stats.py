"""Statistics of small lists."""


def mean(values):
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def median(values):
    """Return the value in the middle, or the mean of the two that are."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return mean([ordered[middle], ordered[middle + 1]])
