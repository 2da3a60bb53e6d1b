"""x"""

COVERED: dict[str, dict[str, str]] = {}
