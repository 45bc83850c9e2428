"""What turns the package, its docstrings and its notebooks into pages. See docs/conf.py."""
