"""megatron-core as a contender."""

ABSENT = "megatron-core is not installed: skipped"


def installed():
    return False


class Megatron: ...
