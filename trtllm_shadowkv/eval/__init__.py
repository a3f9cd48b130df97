"""What ShadowKV costs in accuracy, measured against dense attention of the same engine."""
