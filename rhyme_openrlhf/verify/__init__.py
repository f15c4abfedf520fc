"""`rhyme verify`: does what we promise hold on this machine, with this model and these flags?"""
