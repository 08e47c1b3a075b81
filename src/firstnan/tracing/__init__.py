"""Records one step operator by operator: what each read and wrote, and where in the source."""
