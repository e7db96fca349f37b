"""What torchmetrics and the COCO evaluators do not give."""
