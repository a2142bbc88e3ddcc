"""Who holds memory, and what happens when there is not enough: usable from any LightningModule."""
