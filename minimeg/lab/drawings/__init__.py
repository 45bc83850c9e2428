"""Pictures of the course: functions from a few numbers to SVG text. Each says in one sentence what there is to see.

Colours mean one thing: forward blue, backward orange, wrong vermilion and dashed, ranks named rather than coloured.
"""
