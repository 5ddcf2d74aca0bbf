"""vLLM and SGLang on weights of a gaiafs mount: ``--load-format gaiafs``.

``plugins`` has what the engines call at their start, ``vllm_loader`` and ``sglang_loader`` the loaders, ``mount`` what
the loaders have in common, and ``sharing`` the rule by which a parameter is shared or stays a copy.
"""
