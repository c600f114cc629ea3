"""Files of expert loads and placements: ours, SGLang's and vLLM's. Offline code; torch is imported for ``.pt`` only."""
