"""Checks options and turns them into settings."""
