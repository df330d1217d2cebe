"""What a trained model does with text.

decoding  continues a text token by token
scoring   scores the continuations of multiple-choice tasks
"""
