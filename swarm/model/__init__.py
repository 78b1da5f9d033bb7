"""Layers, stages, boundaries, optimizer and the reference trainer.

``StageTrainer`` (trainer.py) is what a peer computes with; ``ReferenceTrainer`` (reference.py) is what it must equal.
"""
