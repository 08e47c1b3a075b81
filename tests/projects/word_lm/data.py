import os
from io import open

import torch


class Dictionary(object):
    def __init__(self):
        self.word2idx = {}
        self.idx2word = []

    def add_word(self, word):
        if word not in self.word2idx:
            self.idx2word.append(word)
            self.word2idx[word] = len(self.idx2word) - 1
        return self.word2idx[word]

    def __len__(self):
        return len(self.idx2word)


class Corpus(object):
    def __init__(self, path):
        self.dictionary = Dictionary()
        self.train = self.tokenize(os.path.join(path, "train.txt"))
        self.valid = self.tokenize(os.path.join(path, "valid.txt"))

    def tokenize(self, path):
        """Tokenizes a text file."""
        assert os.path.exists(path)
        # Add words to the dictionary
        with open(path, "r", encoding="utf8") as f:
            for line in f:
                for word in line.split() + ["<eos>"]:
                    self.dictionary.add_word(word)

        # Tokenize file content
        with open(path, "r", encoding="utf8") as f:
            idss = []
            for line in f:
                ids = [self.dictionary.word2idx[word] for word in line.split() + ["<eos>"]]
                idss.append(torch.tensor(ids).type(torch.int64))
        return torch.cat(idss)


def load_vectors(path, dictionary, dim):
    """Pretrained word vectors (text format of word2vec); words without a vector start at zero."""
    table = torch.zeros(len(dictionary), dim)
    with open(path, encoding="utf8") as f:
        for line in f:
            word, *numbers = line.split()
            if word in dictionary.word2idx:
                table[dictionary.word2idx[word]] = torch.tensor([float(x) for x in numbers])
    return table
