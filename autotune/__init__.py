"""autotune finds the DeepSpeed configuration that trains a given model fastest on given hardware."""

__version__ = "0.1.0"
