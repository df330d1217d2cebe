"""How tools show what they found: tables of text, pictures, pages.

text_table  the lines of a table with aligned columns
picture     charts of matplotlib, with one look
web_page    an HTML page of one file with tables and pictures, everything in it escaped
"""
