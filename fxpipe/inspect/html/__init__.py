"""Plans and steps as HTML: in notebooks, and in a report."""
