"""What PyTorch keeps private, behind functions named for what they mean."""
