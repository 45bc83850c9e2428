"""The laboratory: a pool of ranks, the ``%%spmd`` cell magic, checks that print, pictures and widgets.

``%load_ext minimeg.lab`` in a notebook makes ``%%spmd`` available; see ``notebooks/00_start_here.ipynb``.
"""
