"""Plans, steps and their comparisons in figures: as data, as text for people, as a document for programs."""
