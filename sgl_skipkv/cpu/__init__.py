"""SGLang's platform plugin and attention for machines without an accelerator."""
