"""Plans and steps as HTML: a report."""
