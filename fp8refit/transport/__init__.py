"""Gives engine ranks in other processes of this host the trainer's tensors, by handle and never by value."""
