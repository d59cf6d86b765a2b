"""Embedded models, trained from scratch on word problems of our own, and how they were made."""
