"""One demo of at most 40 lines for each room: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.NAME``."""
