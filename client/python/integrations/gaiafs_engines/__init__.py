"""vLLM and SGLang on weights of a gaiafs mount: ``--load-format gaiafs``.

``plugins`` has the functions that the engines call when they start. ``vllm_loader`` and ``sglang_loader`` have the
loaders, ``mount`` their common base, and ``sharing`` the rule by which a parameter is shared or stays a copy.
"""
