"""References that import nothing from minimeg: every equality test compares with them."""
