"""Options as given become settings that are checked."""
