"""What stands behind `train_hf.py`: arguments, the run, its batches, evaluation, records, and the way to the Hub."""
