"""Backups that resume a training exactly where it stopped."""
