"""Folders with layer checkpoints: operations on files, what a folder holds, what goes wrong."""
