"""What a trained model does with text.

decoding  continues a text token by token
run_samples  continuations of texts in the log of a run
scoring   scores the continuations of multiple-choice tasks
"""
