"""Plain Horovod: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.plain"""

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from hvfreeze.examples.digits import Digits
from hvfreeze.torchvision_shim import torchvision

EPOCHS = 6
hvd.init()
torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
digits = Digits(hvd.rank(), hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(EPOCHS):
    model.train()
    for images, labels in digits.epoch(epoch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    if digits.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
hvd.shutdown()
