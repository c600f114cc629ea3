"""Operations shared by the core and the plugins: ``<op>.py`` checks and chooses, ``<op>_torch.py`` is the readable truth."""
