"""Clusters drawn as SVG (begin with ``cluster``) and as a tree of text (``outline``)."""
